// exp and what is made of it, for whichever variant's Vec is in scope.
#pragma once

namespace HR_ISA {

// e^x, within 2 units in the last place; 0 below -87.3, the largest it can be above 88.7, NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2.
static inline Vec exp(Vec x) {
  const Vec low = broadcast(-87.3f), high = broadcast(88.72f);
  // max and min pass a NaN on only as their second operand.
  Vec clamped = min(high, max(low, x));
  Vec n = round(mul(clamped, broadcast(1.44269504088896341f)));
  n = min(n, broadcast(127.0f));
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, broadcast(1.0f)));
  Vec value = scale_pow2(p, n);
  return below_or(x, low, broadcast(0.0f), value);
}

}  // namespace HR_ISA
