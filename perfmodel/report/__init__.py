"""From results to what people read. Each room imports those before it only.

    document.py   a `Document` of blocks, which knows no renderer; numbers.py: numbers as text
    render        any document on a terminal, as Markdown, as one page that opens without a network, as JSON
    written.py    `--report FILE`: a document with its pictures and the answer's JSON
    drawing       charts as SVG; figures as plain data, which plotly draws on the page and `figure_svg` as stills
    plots         figures of runs and steps
    runs.py       a run's records on disk, readable even when cut short, and as a timeline for Perfetto
    run_folder.py the folder that a run's files are written to
    views         one pure function from each kind of result to a document
    printed.py    any result by its kind: how results print themselves in Python

Nothing is imported here: a table does not pay for numpy.
"""

__all__: list[str] = []
