"""Compare variants of a model over several seeds: `python compare.py --vary FIELD=A,B --seeds 5`.

The script is gptlite/scripts/compare.py.
"""

from gptlite.scripts import run

if __name__ == "__main__":
    run("compare")
