"""Integrations with host frameworks. Import each module by name; the host is required only when the module is used."""
