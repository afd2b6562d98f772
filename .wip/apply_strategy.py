"""Lines that the strategy table wants in files of others: python /tmp/plan/apply_strategy.py ROOT.

Every replacement must match exactly once, else nothing is written and the text is named.
"""

import sys
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else "/work/main")
texts: dict[Path, str] = {}


def edit(name, *pairs):
    path = ROOT / name
    text = texts.get(path) or path.read_text()
    for old, new in pairs:
        if text.count(old) != 1:
            raise SystemExit(f"{name}: {text.count(old)} times, wanted once:\n{old}")
        text = text.replace(old, new)
    texts[path] = text


edit(
    "flashinfer_ar/workspace.py",
    (
        "from flashinfer_ar.strategy import one_shot_max_bytes, resolve, strategy_of",
        "from flashinfer_ar.strategy import one_shot_limits, strategy_of",
    ),
    ("import contextlib\n", "import contextlib\nimport dataclasses\n"),
    (
        """                timeout_s, max_ctas, debug = env.timeout_s(), env.max_ctas(), env.debug()
""",
        """                timeout_s, max_ctas, debug = env.timeout_s(), env.max_ctas(), env.debug()
                limits = one_shot_limits(self._substrate.target, self.world_size)
""",
    ),
    (
        """                or self._bytes_for(max_num_tokens, hidden_dim, dtype, force_oneshot_support)
""",
        """                or self._bytes_for(
                    max_num_tokens,
                    hidden_dim,
                    dtype,
                    None if force_oneshot_support else limits.largest,
                )
""",
    ),
    (
        """                "the device's architecture": self._substrate.target,
""",
        """                "the device's architecture": self._substrate.target,
                "what the strategy table sends one-shot (FLASHINFER_AR_STRATEGY_TABLE, "
                "flashinfer-ar tune)": limits,
""",
    ),
    (
        """                max_ctas=max_ctas,
""",
        """                max_ctas=max_ctas,
                one_shot_limits=limits,
""",
    ),
    (
        """        force_oneshot: bool,
    ) -> int:
        assert max_num_tokens and hidden_dim and dtype  # checked before
        largest = max_num_tokens * hidden_dim * dtype.itemsize
        one_shot = one_shot_max_bytes(self._substrate.target, self.world_size)
        return plan.generation_bytes_for_all(
            self.world_size, largest, largest if force_oneshot else one_shot
        )
""",
        """        one_shot_max: int | None,
    ) -> int:
        assert max_num_tokens and hidden_dim and dtype  # checked before
        largest = max_num_tokens * hidden_dim * dtype.itemsize
        return plan.generation_bytes_for_all(
            self.world_size, largest, largest if one_shot_max is None else one_shot_max
        )
""",
    ),
    (
        '''        """Bytes of one generation (``buffer_size_in_bytes``) that a call of this shape needs."""
        message_bytes = num_tokens * hidden_dim * dtype.itemsize
        kind = resolve(strategy, target_of(device_of(device)), tp_size, message_bytes)
        return plan.generation_bytes(kind, tp_size, message_bytes)
''',
        '''        """Bytes of one generation (``buffer_size_in_bytes``) that a call of this shape needs.

        Fused or not: ``AUTO`` may choose differently, and the larger need is given.
        """
        message_bytes = num_tokens * hidden_dim * dtype.itemsize
        limits = one_shot_limits(target_of(device_of(device)), tp_size)
        kinds = [limits.resolve(strategy, epilogue, message_bytes) for epilogue in Epilogue]
        return max(plan.generation_bytes(kind, tp_size, message_bytes) for kind in kinds)
''',
    ),
    (
        """        return tp_size == self.world_size and self._calls.slots_sufficient(shape)
""",
        """        return tp_size == self.world_size and all(
            self._calls.slots_sufficient(dataclasses.replace(shape, epilogue=epilogue))
            for epilogue in Epilogue
        )
""",
    ),
    (
        '''        """Whether a call of this shape fits; ``use_oneshot`` is another way to say ``strategy``."""
''',
        '''        """Whether a call of this shape fits, fused or not.

        ``use_oneshot`` is another way to say ``strategy``.
        """
''',
    ),
)
edit(
    "flashinfer_ar/calls.py",
    (
        "from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy, resolve",
        "from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy, OneShotLimits",
    ),
    (
        """    max_ctas: int | None  # FLASHINFER_AR_MAX_CTAS
""",
        """    max_ctas: int | None  # FLASHINFER_AR_MAX_CTAS
    one_shot_limits: OneShotLimits
""",
    ),
    (
        """        world_size = self._settings.world_size
        return resolve(shape.strategy, self._substrate.target, world_size, shape.message_bytes)
""",
        """        limits = self._settings.one_shot_limits
        return limits.resolve(shape.strategy, shape.epilogue, shape.message_bytes)
""",
    ),
)
edit(
    "flashinfer_ar/doctor/host.py",
    ("import one_shot_max_bytes", "import one_shot_limits"),
    (
        "    limit = one_shot_max_bytes(HOST_TARGET, _TYPICAL_RANKS)\n",
        "    limit = one_shot_limits(HOST_TARGET, _TYPICAL_RANKS).largest\n",
    ),
)
edit(
    "pyproject.toml",
    (
        'flashinfer_ar = ["py.typed", "include/**/*.cuh", "include/**/*.hpp"]\n',
        'flashinfer_ar = ["py.typed", "include/**/*.cuh", "include/**/*.hpp"]\n'
        '"flashinfer_ar.strategy_tables" = ["*.json"]\n',
    ),
)
edit(
    "tests/conftest.py",
    ("import gc\n", "import gc\nfrom collections.abc import Iterator\n"),
    (
        '@pytest.fixture(autouse=True, scope="module")\n',
        '''@pytest.fixture(autouse=True, scope="session")
def no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A strategy table of the user's would decide for ``AUTO``, here and in ranks' processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("FLASHINFER_AR_STRATEGY_TABLE", raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
''',
    ),
)
edit(
    "tests/test_doctor.py",
    ('monkeypatch.setattr(cli, "end_without_peers"', 'monkeypatch.setattr(cli.doctor, "end_without_peers"'),
)
edit(
    "tests/test_cli.py",
    ("max_ctas=None, timeout_ns=1,", "max_ctas=None, timeout_ns=1,\n            one_shot_limits=OneShotLimits(0, 0),"),
    ("from flashinfer_ar.launch.host import HostSubstrate\n", "from flashinfer_ar.launch.host import HostSubstrate\nfrom flashinfer_ar.strategy import OneShotLimits\n"),
)
# The strategy's tests are in tests/test_strategy.py now.
path = ROOT / "tests/test_plan.py"
text = path.read_text()
start = text.index("# Strategy\n")
caps = "_NUM_SMS" if "_NUM_SMS" in text else "_MAX_CTAS"
texts[path] = text[:start] + (
    "# Caps\n\n\ndef test_every_target_has_its_caps():\n"
    f"    assert set(plan.{caps}) == set(TARGETS)\n"
)
edit(
    "tests/test_plan.py",
    ("Geometry, grid, slots and strategy: pure", "Geometry, grid and slots: pure"),
    ("from flashinfer_ar import plan, strategy\n", "from flashinfer_ar import plan\n"),
    (
        "from flashinfer_ar.strategy import MNNVLAllreduceFusionStrategy as Strategy\n"
        "from flashinfer_ar.strategy import one_shot_max_bytes, resolve\n",
        "",
    ),
)
if texts[path].count("itertools") == 1:
    edit("tests/test_plan.py", ("import itertools\n\n", ""))
# Kept so that nothing broke before these lines were in.
path = ROOT / "flashinfer_ar/strategy.py"
text = path.read_text()
texts[path] = text[: text.index("def one_shot_max_bytes(")].rstrip() + "\n"

for path, text in texts.items():
    path.write_text(text)
print(f"{len(texts)} files edited")
