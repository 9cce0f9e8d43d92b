// Replays a recorded program: looks an operation's buffers up and calls the variant's function.
#include "program.h"

namespace headrace {

namespace {

struct Views {
  const Step& step;

  View operator()(const Slot& slot) const {
    if (slot.buffer < 0) return {nullptr, 0};
    const Buffer& buffer = step.buffers[slot.buffer];
    return {buffer.data + slot.column, buffer.width};
  }
};

}  // namespace

void run_program(const Kernels& kernels, Pool* pool, const Op* ops, int64_t count, const Step& step) {
  const Views view{step};
  const BatchView& batch = step.groups[0];
  for (const Op* op = ops; op != ops + count; op++) {
    const int64_t rows = op->sampling ? step.num_sample_rows : batch.num_rows;
    if (rows == 0) continue;
    const int64_t* n = op->n;
    const View in0 = view(op->in[0]), in1 = view(op->in[1]), out = view(op->out[0]);
    switch (op->kind) {
      case OpKind::kEmbed:
        kernels.gather(pool, {static_cast<const PackedMatrix*>(op->p[0]), n[0] == 1 ? batch.positions : batch.token_ids,
                              rows, out});
        break;
      case OpKind::kLinear:
        kernels.linear(pool, {in0, rows, static_cast<const PackedMatrix*>(op->p[0]),
                              static_cast<const float*>(op->p[1]), out});
        break;
      case OpKind::kNorm:
        kernels.norm(pool, {in0, in1, static_cast<const float*>(op->p[0]), op->f[0], rows, n[0], n[1], out,
                            view(op->out[1])});
        break;
      case OpKind::kRope:
        kernels.rope(pool, {in0, static_cast<const float*>(op->p[0]), static_cast<const float*>(op->p[1]), n[0], n[1],
                            n[2], rows, batch.positions, out});
        break;
      case OpKind::kAttention:
        kernels.attention(pool, {in0, in1, view(op->in[2]), step.cache, n[0], n[2], n[3], n[4], op->f[0], n[5],
                                 &step.groups[n[1]], out});
        break;
      case OpKind::kSiluMul:
        kernels.silu_mul(pool, {in0, rows, n[0], out});
        break;
      case OpKind::kGeluMul:
        kernels.gelu_mul(pool, {in0, rows, n[0], out});
        break;
      case OpKind::kScale:
        kernels.scale(pool, {in0, op->f[0], rows, n[0], out});
        break;
      case OpKind::kAdd:
        kernels.add(pool, {in0, in1, rows, n[0], out});
        break;
      case OpKind::kPick:
        kernels.pick(pool, {in0, step.sample_rows, rows, n[0], out});
        break;
      case OpKind::kExperts:
        kernels.experts(pool, {in0, in1, static_cast<const PackedMatrix* const*>(op->p[0]),
                               static_cast<const PackedMatrix* const*>(op->p[1]), rows, n[0], n[1], n[2],
                               static_cast<int32_t>(n[3]), out});
        break;
      case OpKind::kLayerNorm:
        kernels.layer_norm(pool, {in0, static_cast<const float*>(op->p[0]), static_cast<const float*>(op->p[1]),
                                  op->f[0], rows, n[0], out});
        break;
      case OpKind::kGelu:
        kernels.gelu(pool, {in0, rows, n[0], out});
        break;
      case OpKind::kTanh:
        kernels.tanh(pool, {in0, rows, n[0], out});
        break;
      case OpKind::kEncoderAttention:
        kernels.encoder_attention(pool, {in0, in1, view(op->in[2]), n[0], n[1], op->f[0], &batch, out});
        break;
    }
  }
}

}  // namespace headrace
