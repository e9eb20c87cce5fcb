"""Process launch: the bundled model definition and `userkv serve`."""
