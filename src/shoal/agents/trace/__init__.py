"""What a run did: its records, a timeline, a page, OpenTelemetry spans."""
