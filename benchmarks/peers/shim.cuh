// What the shims share: a rank's call as C sees it, and a launch that can be measured instead.
// A shim includes this file, then the peer's header, whose launches then come here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

// Mirrored by _Call in shim.py.
struct Call {
  int world_size;
  int rank;
  int num_tokens;
  int hidden;
  int two_shot;
  int fused;
  float epsilon;
  void* input;
  void* output;
  void* residual_in;
  void* residual_out;
  void* gamma;
  cudaStream_t stream;
};

// CTAs of a launch, and how many of them the device holds at once. Mirrored by _Room in shim.py.
struct Room {
  int ctas;
  int held;
};

// Where the next launches are measured; null while they are made.
static thread_local Room* measured = nullptr;

static cudaError_t count_held(void const* kernel, cudaLaunchConfig_t const& config, int* held) {
  cudaLaunchConfig_t shape = config;
  shape.numAttrs = 0;
  dim3 cluster{1, 1, 1};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    auto const& dims = config.attrs[i].val.clusterDim;
    cluster = dim3{dims.x, dims.y, dims.z};
    shape.attrs = &config.attrs[i];
    shape.numAttrs = 1;
  }
  int const cluster_size = cluster.x * cluster.y * cluster.z;
  if (cluster_size > 1) {
    int clusters = 0;
    cudaError_t const status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &shape);
    *held = clusters * cluster_size;
    return status;
  }
  int device = 0, num_sms = 0, per_sm = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    int const block = shape.blockDim.x * shape.blockDim.y * shape.blockDim.z;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, block,
                                                           shape.dynamicSmemBytes);
  }
  *held = per_sm * num_sms;
  return status;
}

// Of a call's launches, the one that fills the device most is kept.
static cudaError_t measure(void const* kernel, cudaLaunchConfig_t const& config, Room* room) {
  // Loads the kernel too: one that is loaded at its launch would wait for those that already spin.
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  int const ctas = config.gridDim.x * config.gridDim.y * config.gridDim.z;
  int held = 0;
  status = count_held(kernel, config, &held);
  if (room->ctas == 0 || int64_t{ctas} * room->held > int64_t{room->ctas} * held) {
    *room = Room{ctas, held};
  }
  return status;
}

// Stands for cudaLaunchKernelEx.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_or_measure(cudaLaunchConfig_t const* config, void (*kernel)(Parameters...),
                              Arguments&&... arguments) {
  if (measured != nullptr) return measure(reinterpret_cast<void const*>(kernel), *config, measured);
  return cudaLaunchKernelEx(config, kernel, std::forward<Arguments>(arguments)...);
}

// Makes the launches of `body`, or measures them where `room` is not null. Returns what went wrong,
// or null; the text lasts until the thread's next call.
template <typename Body>
char const* make_call(Room* room, Body body) {
  static thread_local std::string error;
  error.clear();
  measured = room;
  try {
    int num_devices = 0;
    cudaError_t status = cudaGetDeviceCount(&num_devices);  // the peers' code takes one for granted
    if (status == cudaSuccess) status = body();
    if (status != cudaSuccess) error = cudaGetErrorString(status);
  } catch (std::exception const& failure) {
    error = failure.what();
  }
  measured = nullptr;
  if (error.empty()) return nullptr;
  cudaGetLastError();  // else the thread's next call would report it again
  return error.c_str();
}

#define cudaLaunchKernelEx launch_or_measure
// The peers' host-side log would need spdlog.
#define FLASHINFER_LOGGING_H_
#define FLASHINFER_LOG_DEBUG(...)
