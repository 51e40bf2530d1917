"""Trust in an answer: `trust_of` compares its setup with validated ones."""

from perfmodel.trust.badge import LEVELS, Level, Trust, nearest_rows, trust_of
from perfmodel.trust.index import MeasuredCell, MeasuredRow, MeasuredSetup, measured_cells, measured_rows, setup_of
