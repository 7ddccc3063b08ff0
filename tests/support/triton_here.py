"""Import this before anything that imports Triton: without a GPU its kernels run in the interpreter."""

import os

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it was before Triton 3.9, which warns that it will change

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
