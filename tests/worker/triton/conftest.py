"""Without a GPU kernels run in Triton's interpreter: said before anything imports Triton."""

import os

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it was before Triton 3.9, which warns that it will change

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
