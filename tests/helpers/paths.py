"""Folders that tests read."""

from pathlib import Path

PROJECT = Path(__file__).parents[2]
TESTS = PROJECT / "tests"
HELPERS = TESTS / "helpers"
MODELS = TESTS / "models"
