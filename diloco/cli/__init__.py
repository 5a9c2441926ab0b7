"""The command line: every `diloco ...`, its options, exit codes and lines. Nothing else prints."""
