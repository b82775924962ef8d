"""Results computed from run directories: report pages, time attribution, audit; without torch."""
