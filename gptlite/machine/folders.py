"""Where gptlite is, and what it fetches, whatever the working folder is."""

from pathlib import Path

# The clone.
ROOT = Path(__file__).resolve().parents[2]
# Texts that were fetched, and large ones as ids.
DATA_FOLDER = ROOT / "data"
