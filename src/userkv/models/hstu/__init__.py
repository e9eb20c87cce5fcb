"""HSTU: a transducer with pointwise attention, trained and served."""
