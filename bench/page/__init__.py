"""The page of ``shardfuse bench report --html``: results, their plots and their filters in one file of HTML."""
