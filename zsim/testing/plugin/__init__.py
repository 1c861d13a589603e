"""Parts of the pytest plugin: options, markers, scenario files as items, the summary."""
