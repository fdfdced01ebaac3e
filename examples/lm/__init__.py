"""The parts of the demo: its text, its model, its schedule of training and what it shows."""
