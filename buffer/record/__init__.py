"""Episode records: fields, wire form, rules, large payloads elsewhere."""
