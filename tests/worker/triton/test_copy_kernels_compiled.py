"""What the interpreter cannot show: the compiled shift reads all of its columns before it writes one.

Compiled in a process of its own, for a GPU that need not be there: in this one Triton may be set to interpret.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

SEPARATOR = "==== next ===="


def shift_ptx(one: str, other: str) -> str:
    """The shift of 2-byte elements, ``one`` of whose strides is 1 and known when it is compiled."""
    import triton  # noqa: PLC0415 - only in the process that compiles
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - as above
    from triton.compiler import ASTSource  # noqa: PLC0415 - as above

    from hybridkv.worker.kernels import copies  # noqa: PLC0415 - as above

    signature = {"stack": "*i16", "source": "*i64", "destination": "*i64", "bias": "*i64"}
    signature |= {"layer_stride": "i64", "block_stride": "i64", one: "constexpr", other: "i32"}
    signature |= dict.fromkeys(("layers", "tiles", "columns", "channels"), "i32")
    signature |= {"all_columns": "constexpr", "tile": "constexpr"}
    source = ASTSource(fn=copies._shift_kernel, signature=signature, constexprs={one: 1, "all_columns": 8, "tile": 256})
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return ptx


def test_all_columns_are_read_before_one_is_written() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(  # noqa: S603 - this very file
        [sys.executable, str(Path(__file__))], env=environment, capture_output=True, text=True, check=True
    )
    kernels = made.stdout.split(SEPARATOR)
    assert len(kernels) == 2
    for kernel in kernels:
        lines = kernel.splitlines()
        reads = [i for i, line in enumerate(lines) if re.search(r"ld\.global\S*b16", line)]
        writes = [i for i, line in enumerate(lines) if "st.global" in line]
        barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
        assert reads
        assert any(max(reads) < barrier < min(writes) for barrier in barriers)


if __name__ == "__main__":
    strides = ("channel_stride", "column_stride")
    print(shift_ptx(*strides), SEPARATOR, shift_ptx(*reversed(strides)))  # noqa: T201 - what the test reads
