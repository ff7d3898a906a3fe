"""Operations that are written otherwise for speed, each with its reference."""
