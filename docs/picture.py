"""Draw docs/images/inspect.png by what the README shows: python docs/picture.py, with Chromium on the path."""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "inspect.png"
README = Path(__file__).parent.parent / "README.md"

BROWSER = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=2 --window-size=780,410"


def main() -> None:
    """Write the files of the README, the page with the graph, and its picture."""
    text = README.read_text(encoding="utf-8")
    program = re.search(r"^```python\n(# files\.py\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ (sonnx (?:compare .*--json|inspect ).*)$", text, re.MULTILINE)
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None or len(commands) != 2 or browser is None:
        sys.exit("the README lacks files.py or the two commands of the picture, or there is no Chromium")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", program[1]], cwd=folder, check=True)
        for command in commands:
            line, _, file = command.partition("  #")[0].partition(" > ")
            done = subprocess.run(shlex.split(line), cwd=folder, stdout=subprocess.PIPE)
            if file:
                Path(folder, file).write_bytes(done.stdout)
        page = Path(folder, "graph.html").as_uri()
        subprocess.run([browser, *BROWSER.split(), f"--screenshot={PICTURE}", page], check=True, capture_output=True)


if __name__ == "__main__":
    main()
