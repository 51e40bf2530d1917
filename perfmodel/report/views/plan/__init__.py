"""A plan as a document, at a rate or of an offline job: the choice in sentences, finalists, commands, pictures."""
