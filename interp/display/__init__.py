"""How records look in a notebook: a sentence, a still picture and a table; nothing runs, nothing is fetched.

Each module has, for its kind of record:

    words(record)       sentences, most important first
    shown(record)       the table that is shown, strongest first
    to_pandas(record)   the table with everything
    figure(record, mode)  the figure, or None

A display is pictures and text only, so that it looks the same in Jupyter, VS Code, an exported page and a
notebook that nobody has run; `record.figure()` is the same figure to be moved through.
"""
