"""Command lines of the tools: `draftsmith NAME`, one file a tool."""
