"""From a result to a document: one pure function for each kind of answer. A view knows no renderer."""
