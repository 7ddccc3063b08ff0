"""Pictures of the live page under traffic, at three widths, into a folder; a minute each."""

import io
import sys
from pathlib import Path

from page_support import browser, tab, traffic
from PIL import Image
from serve_support import serving

from hybridkv.runner import Engine, EngineOptions, load
from hybridkv.serve import ServeOptions

WIDTHS = {1280: "light", 820: "dark", 390: "light"}
WATCHED_S = 30


def main(folder: Path) -> None:
    """One WebP a width."""
    folder.mkdir(parents=True, exist_ok=True)
    options = EngineOptions(max_running=6, remembered_losses=1 << 16)
    target = Engine(load("tiny:qwen3_next"), memory="3MiB", max_model_len=512, options=options)
    with serving(target, ServeOptions(max_waiting=50)) as served, traffic(served.url, 10), browser() as opened:
        for width, scheme in WIDTHS.items():
            with tab(opened, served.url, width, scheme) as page:
                page.wait_for_timeout(WATCHED_S * 1000)
                picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            file = folder / f"live-{width}.webp"
            picture.convert("RGB").save(file, "WEBP", quality=25, method=6)
            print(f"{file}: {picture.size[0]} x {picture.size[1]}, {file.stat().st_size:,} bytes")  # noqa: T201 - a script


if __name__ == "__main__":
    main(Path(sys.argv[1]))
