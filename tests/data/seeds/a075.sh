#!/bin/bash
MODEL_PATH="/models/Qwen2.5-72B-Instruct"
SERVED_NAME="Qwen2.5-72B-Instruct"
TP_SIZE=8
GPU_UTIL=0.95
MAX_LEN=32768

python -m vllm.entrypoints.openai.api_server \
  --model $MODEL_PATH \
  --served-model-name $SERVED_NAME \
  --tensor-parallel-size $TP_SIZE \
  --gpu-memory-utilization $GPU_UTIL \
  --max-model-len $MAX_LEN \
  --trust-remote-code \
  --dtype half \
  --enable-chunked-prefill \
  --max-num-seqs 2 \
  --max-num-batched-tokens 32768 \
  --host 0.0.0.0 \
  --port 8000
