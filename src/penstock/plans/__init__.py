"""The plan: what it holds (`plan`), its file (`schema`), what makes it valid (`validity`), simple ones (`build`)."""
