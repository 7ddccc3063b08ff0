"""Without a GPU kernels run in Triton's interpreter: said before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
