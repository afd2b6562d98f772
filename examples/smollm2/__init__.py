"""SmolLM2-135M-Instruct served tensor-parallel: a small engine on flashinfer_ar's fused allreduce.

Read in this order: weights (what a rank loads), parallel (the fused call), model (one step),
engine (a request), tokenizer, launch (how ranks come to be). ``serve_smollm2.py`` ties them up.
"""
