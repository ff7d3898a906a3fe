"""Train a language model: `python train.py [PRESET] [--section.field value ...]`.

The script is gptlite/scripts/train.py.
"""

from gptlite.scripts import run

if __name__ == "__main__":
    run("train")
