"""Pictures of a Run: Chrome traces and plots."""
