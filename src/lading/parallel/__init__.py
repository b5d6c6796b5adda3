"""From a table and a layout to what each rank runs."""
