"""Integrations with frameworks. Import a module by name; its framework is required only when the module is used."""
