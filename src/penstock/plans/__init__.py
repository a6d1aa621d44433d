"""The plan: one way to train one model on one cluster.

What it holds (`plan`), along which axes stages are divided and which rank is where (`degrees`, `ranks`), its file (`schema`, `spec`),
the model and cluster that it names (`references`), what makes it valid (`validity`) and what the runtime can run of it (`capabilities`),
remarks on it (`remarks`), plain plans (`build`), and what other systems can express of one (`grid`).
"""
