"""The documentation as a site: what MkDocs needs beside docs/, and the pages that are generated from the code.

`make docs` builds it into build/site. Nothing here is part of the package: it reads the package, and the package never
imports it.
"""
