"""From results to what people read. Each room imports those before it only.

    document.py   a `Document` of blocks, which knows no renderer; numbers.py: numbers as text
    drawing       figures as plain data, which plotly draws on the page and `figure_svg` as stills
    pages.py      any document as Markdown, as one page that opens without a network; `--report FILE`
    plots         figures of runs, steps, what-ifs and plans
    runs.py       a run's folder, its records, readable even when cut short, and as a timeline for Perfetto
    views         one pure function from each kind of result to a document
    terminal.py   any document on a terminal; any result by its kind: how results print themselves in Python

Nothing is imported here: a table does not pay for numpy."""

__all__: list[str] = []
