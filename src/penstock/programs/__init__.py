"""From schedules to instructions per rank: their text and binary forms, and the checker that proves them safe."""
