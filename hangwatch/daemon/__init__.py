"""The watching loop and the children that look outside for it."""
