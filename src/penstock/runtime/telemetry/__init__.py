"""What a run tells of itself: steps, spans, device samples, and how they compare with the prediction."""
