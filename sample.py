"""Generate text with a trained model: `python sample.py --prompt "ROMEO:"`.

The script is gptlite/scripts/sample.py.
"""

from gptlite.scripts import run

if __name__ == "__main__":
    run("sample")
