"""Lets every test import what stands beside this file, such as the trainer in miniature."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
