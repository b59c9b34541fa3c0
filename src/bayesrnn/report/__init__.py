"""One page about one run or several: figures, and texts shaded by what a model does not know.

`findings.py` says what is known of a run: `readings.py` reads its data (`passage.py` a text,
`captions.py` pictures, `forecasts.py` a series), and `maps.py` takes its weight matrices apart.
`figures.py` and `table.py` show it, and `page.py` writes one HTML file that needs nothing else.
"""

from bayesrnn.report.choices import Choices
from bayesrnn.report.findings import Findings, examine
from bayesrnn.report.page import write_page

__all__ = ["Choices", "Findings", "examine", "write_page"]
