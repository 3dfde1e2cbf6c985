"""Files of people, as the code of 2026-11-23 wrote them. README.md says what each is."""
