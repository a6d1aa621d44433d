"""What people look at: timelines as text, figures and traces."""
