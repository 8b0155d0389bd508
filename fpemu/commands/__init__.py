"""The subcommands of `fpemu`, one subject a file."""
