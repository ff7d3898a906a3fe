"""Say what a larger model will reach before it is trained: `python forecast.py --minutes 30`.

The script is gptlite/scripts/forecast.py.
"""

from gptlite.scripts import run

if __name__ == "__main__":
    run("forecast")
