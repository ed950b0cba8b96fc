import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lazyjax.optim import codes

BLOCK = 256
ALL_CODES_M = np.concatenate([np.arange(128), np.arange(-127, 0)]).astype(np.int8)
SCALES = (1.3e-29, 1e-12, 1.0, 3.3e4, 1e30, 3.4e38)

encode_m, decode_m = jax.jit(codes.encode_m), jax.jit(codes.decode_m)
encode_v, decode_v = jax.jit(codes.encode_v), jax.jit(codes.decode_v)


def blocks(values: np.ndarray) -> jnp.ndarray:
    values = np.asarray(values, np.float32).reshape(-1)
    return jnp.asarray(np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
mixed_block = hnp.arrays(np.float32, BLOCK, elements=finite)


@given(mixed_block)
def test_m_decodes_finite_with_the_same_signs_and_a_bounded_error(m: np.ndarray) -> None:
    coded = encode_m(blocks(m))
    back = np.asarray(decode_m(coded)).reshape(-1)
    largest = np.abs(m).max()
    assert np.isfinite(back).all()
    counts = largest >= 2**-96
    assert np.asarray(coded.scale_K)[0] == (largest if counts else 0)
    if not counts:
        assert not np.asarray(coded.codes_KS).any()
        return
    assert np.abs(back).max() <= max(largest, np.finfo(np.float32).tiny)
    kept = back != 0
    assert (np.signbit(back) == np.signbit(m))[kept].all()
    # Half a level at relative size r is 2 r^(3/4) / 127 of the scale; the bit-pattern root bends
    # that by up to a factor of 2, and r below (1 / 254)^4 or so becomes zero.
    relative = np.abs(m.astype(np.float64)) / max(float(largest), 1e-300)
    bound = (2 * 2 / 127 * relative**0.75 + (2 / 127) ** 4 * 4) * float(largest) + 2e-38
    assert (np.abs(back.astype(np.float64) - m) <= bound).all()


@given(mixed_block, st.integers(1, 2**31 - 1))
def test_only_a_zero_v_has_code_zero(v: np.ndarray, count: int) -> None:
    v = np.abs(v)
    coded = encode_v(blocks(v), jnp.int32(count))
    back = np.asarray(decode_v(coded)).reshape(-1)
    assert ((np.asarray(coded.codes_KS).reshape(-1) == 0) == (v == 0)).all()
    assert np.isfinite(back).all()
    assert ((back == 0) == (v == 0)).all()
    assert back.max() <= max(v.max(), np.finfo(np.float32).tiny)


@pytest.mark.parametrize("scale", SCALES)
def test_codes_survive_decoding_and_encoding(scale: float) -> None:
    """Every code stands for a value that is encoded as that code again."""
    codes_KS = np.full((1, BLOCK), 127, np.int8)
    codes_KS[0, : ALL_CODES_M.size] = ALL_CODES_M
    coded = codes.CodedMoment(jnp.asarray(codes_KS), jnp.full(1, scale, jnp.float32))
    value = np.asarray(decode_m(coded))
    again = encode_m(jnp.asarray(value))
    clamped = np.abs(value) == np.finfo(np.float32).tiny
    assert (np.asarray(again.codes_KS) == codes_KS)[~clamped].all()
    assert (np.diff(np.abs(value[0, :128])) >= 0).all()

    coded = codes.CodedMoment(
        jnp.arange(256, dtype=jnp.uint8).reshape(1, BLOCK), jnp.full(1, scale, jnp.float32)
    )
    value = np.asarray(decode_v(coded))
    assert (np.diff(value[0]) >= 0).all()
    clamped = value == np.finfo(np.float32).tiny
    for count in (1, 2, 77):
        again = encode_v(jnp.asarray(value), jnp.int32(count))
        assert (np.asarray(again.codes_KS) == np.arange(256))[~clamped].all()


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(BLOCK),
        np.full(BLOCK, -0.0),
        np.full(BLOCK, 1e-40),
        np.eye(1, BLOCK, 3)[0] * 1e30,
        np.eye(1, BLOCK, 3)[0] * 1e-40,
        np.geomspace(1e-38, 1e38, BLOCK),
        np.full(BLOCK, np.finfo(np.float32).max),
    ],
    ids=["zeros", "negative zeros", "denormals", "spike", "denormal spike", "all scales", "largest"],
)
def test_degenerate_blocks_decode_finite(values: np.ndarray) -> None:
    m = np.asarray(decode_m(encode_m(blocks(values))))
    v = np.asarray(decode_v(encode_v(blocks(np.abs(values)), jnp.int32(5))))
    assert np.isfinite(m).all()
    assert np.isfinite(v).all()
    zero = np.asarray(values, np.float32).reshape(1, -1) == 0
    assert (m[zero] == 0).all()
    assert (v[zero] == 0).all()


def test_offsets_are_even_over_steps_for_every_position() -> None:
    offsets = np.stack([np.asarray(codes.rounding_offsets(jnp.int32(t), BLOCK)) for t in range(1, 1001)])
    assert offsets.min() >= 0
    assert offsets.max() < 1
    # Far below the 0.03 of 1000 random numbers.
    expected = (np.arange(1000) + 0.5) / 1000
    assert np.abs(np.sort(offsets, axis=0) - expected[:, None]).max() < 0.005


def test_v_follows_a_gradient_that_shrinks_and_rounding_to_nearest_would_not() -> None:
    """The reason for the offsets: half a block's gradient falls tenfold, the largest one stays."""
    target = np.where(np.arange(BLOCK) < BLOCK // 2, 1e-8, 1e-6).astype(np.float32)
    start = np.full(BLOCK, 1e-6, np.float32)

    def decay(coded: codes.CodedMoment, count: jax.Array) -> jax.Array:
        return jnp.float32(0.999) * codes.decode_v(coded) + jnp.float32(0.001) * target

    def walk(nearest: bool) -> np.ndarray:
        @jax.jit
        def step(count: jax.Array, coded: codes.CodedMoment) -> codes.CodedMoment:
            v = decay(coded, count)
            if not nearest:
                return codes.encode_v(v, count)
            bits = jax.lax.bitcast_convert_type(v, jnp.int32)
            largest = bits.max(axis=1)
            position = codes._position(bits, largest, codes.V_LARGEST, codes.V_ROOT)
            code = codes._round(position, jnp.float32(0.5), bits)
            return codes.CodedMoment(
                code.astype(jnp.uint8), jax.lax.bitcast_convert_type(largest, jnp.float32)
            )

        first = codes.encode_v(blocks(start), jnp.int32(0))
        return np.asarray(codes.decode_v(jax.lax.fori_loop(1, 4000, step, first)))[0]

    exact = target + (start - target) * 0.999**3999
    np.testing.assert_allclose(walk(nearest=False), exact, rtol=0.25)  # five levels; nearest: 300 %
    assert (walk(nearest=True)[: BLOCK // 2] > 3 * exact[: BLOCK // 2]).all()
