"""One page about one run or several: figures, and a text shaded by what a model does not know.

`findings.py` measures a run, `maps.py` takes its weight matrices apart, `figures.py` draws, and
`page.py` writes one HTML file that needs nothing else.
"""

from bayesrnn.report.findings import Choices, Findings, examine
from bayesrnn.report.page import write_page

__all__ = ["Choices", "Findings", "examine", "write_page"]
