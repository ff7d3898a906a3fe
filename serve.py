"""Serve a trained model, with a page for browsers and OpenAI's API: `python serve.py`.

The script is gptlite/scripts/serve.py.
"""

from gptlite.scripts import run

if __name__ == "__main__":
    run("serve")
