// Index scores and the choice of keys, with its metadata (spec: ascend 5.2). Of the documented forms the simulator
// knows batches of rows with used lengths: layout BSND, no mask, no block table, MXFP4.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "mx.h"

using namespace ascend_sim;

namespace {

constexpr int64_t kHeadDim = 128;
constexpr int64_t kMxfp4 = 5;
constexpr int64_t kMetadataWords = 1024;
constexpr double kMetadataMagic = 0x514C49;

// What both operators must be given alike; the metadata carries it to the main operator.
Values MetadataWords(int64_t heads, int64_t top_k) {
  Values words(kMetadataWords, 0.0);
  words[0] = kMetadataMagic;
  words[1] = static_cast<double>(heads);
  words[2] = static_cast<double>(top_k);
  return words;
}

void CheckForms(const Plan& plan, int64_t heads, int64_t top_k, int64_t quant_mode, const char* layout_q,
                const char* layout_k, int64_t mask, int64_t ratio) {
  plan.NotNull({{"layoutQ", layout_q}, {"layoutK", layout_k}});
  plan.Require(std::string(layout_q) == "BSND" && std::string(layout_k) == "BSND",
               "the simulator knows layout BSND only");
  plan.Require(mask == 0 && ratio == 1, "the simulator knows maskMode 0 and cmpRatio 1 only");
  plan.Require(quant_mode == kMxfp4, "the simulator knows quantMode 5 only");
  plan.Require(heads >= 1 && heads <= 64, "there are " + std::to_string(heads) + " heads");
  plan.Require(top_k >= 1 && top_k <= 8192, "topk is " + std::to_string(top_k));
}

void CheckMetadata(const Plan& plan, const aclTensor* metadata) {
  plan.Type("metadata", metadata, {DataType::kInt32});
  plan.Shape("metadata", metadata, {kMetadataWords});
}

struct Choice {
  aclTensor q, keys, weights, q_scale, key_scale, used, metadata, places, scores;
  int64_t top_k;

  void operator()(const Memory& memory) const {
    const int64_t heads = q.dim(2), num_keys = keys.dim(1);
    if (memory.Load(metadata) != MetadataWords(heads, top_k)) {
      throw Refusal{kCoreException, "the metadata was made for other settings, or is not there yet"};
    }
    const Values queries = ApplyMxScales(memory.Load(q), memory.Load(q_scale), q.dims);
    const Values rows = ApplyMxScales(memory.Load(keys), memory.Load(key_scale), keys.dims);
    const Values mix = memory.Load(weights), lengths = memory.Load(used);
    Values chosen, values;
    for (int64_t batch = 0; batch < q.dim(0); ++batch) {
      const auto length = static_cast<int64_t>(lengths[batch]);
      if (length < 0 || length > num_keys) throw Refusal{kCoreException, "a used length of " + std::to_string(length)};
      Values all;
      for (int64_t i = 0; i < length; ++i) {
        all.push_back(Score(queries.data() + batch * heads * kHeadDim, rows.data() + (batch * num_keys + i) * kHeadDim,
                            mix.data() + batch * heads, heads));
      }
      Choose(all, chosen, values);
    }
    memory.Store(places, chosen);
    memory.Store(scores, values);
  }

  static double Score(const double* queries, const double* key, const double* mix, int64_t heads) {
    double score = 0;
    for (int64_t head = 0; head < heads; ++head) {
      double dot = 0;
      for (int64_t i = 0; i < kHeadDim; ++i) dot += queries[head * kHeadDim + i] * key[i];
      score += mix[head] * std::max(dot, 0.0);
    }
    return score;
  }

  // Best first; the earlier key where scores are equal, which is our choice.
  void Choose(const Values& all, Values& chosen, Values& values) const {
    std::vector<int64_t> order(all.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return all[a] > all[b]; });
    for (int64_t i = 0; i < top_k; ++i) {
      const bool is_there = i < static_cast<int64_t>(order.size());
      chosen.push_back(is_there ? static_cast<double>(order[i]) : -1.0);
      values.push_back(is_there ? all[order[i]] : -std::numeric_limits<double>::infinity());
    }
  }
};

}  // namespace

SIM_EXPORT aclnnStatus aclnnQuantLightningIndexerV2MetadataGetWorkspaceSize(
    const aclTensor* cu_q, const aclTensor* cu_k, const aclTensor* used_q, const aclTensor* used_k,
    const aclTensor* residual, int64_t heads, int64_t key_heads, int64_t head_dim, int64_t top_k, int64_t quant_mode,
    int64_t batch, int64_t max_q, int64_t max_k, const char* layout_q, const char* layout_k, int64_t mask,
    int64_t ratio, const aclTensor* metadata, uint64_t* bytes, aclOpExecutor** executor) {
  return Prepare("aclnnQuantLightningIndexerV2Metadata", bytes, executor, [&](Plan& plan) {
    // A null pointer here crashes the real operator; an absent one is an empty INT32 tensor.
    for (const aclTensor* length : {cu_q, cu_k, used_q, used_k, residual}) {
      plan.NotNull({{"a length tensor", length}});
      plan.Type("a length tensor", length, {DataType::kInt32});
    }
    plan.NotNull({{"metadata", metadata}});
    CheckForms(plan, heads, top_k, quant_mode, layout_q, layout_k, mask, ratio);
    plan.Require(key_heads == 1 && head_dim == kHeadDim, "headDim is " + std::to_string(head_dim) + " instead of 128");
    CheckMetadata(plan, metadata);
    plan.Attribute("batchSize", static_cast<double>(batch));
    plan.Attribute("maxSeqlenQ", static_cast<double>(max_q));
    plan.Attribute("maxSeqlenK", static_cast<double>(max_k));
    plan.Touches({used_k, metadata});
    plan.Work([metadata = *metadata, heads, top_k](const Memory& memory) {
      memory.Store(metadata, MetadataWords(heads, top_k));
    });
  });
}
SIM_PHASE_TWO(aclnnQuantLightningIndexerV2Metadata)

SIM_EXPORT aclnnStatus aclnnQuantLightningIndexerV2GetWorkspaceSize(
    const aclTensor* q, const aclTensor* keys, const aclTensor* weights, const aclTensor* q_scale,
    const aclTensor* key_scale, const aclTensor* cu_q, const aclTensor* cu_k, const aclTensor* used_q,
    const aclTensor* used_k, const aclTensor* residual, const aclTensor* block_table, const aclTensor* index_offset,
    const aclTensor* metadata, int64_t top_k, int64_t quant_mode, int64_t max_q, const char* layout_q,
    const char* layout_k, int64_t mask, int64_t ratio, int64_t return_value, const aclTensor* places,
    const aclTensor* scores, uint64_t* bytes, aclOpExecutor** executor) {
  return Prepare("aclnnQuantLightningIndexerV2", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"query", q}, {"key", keys}, {"weights", weights}, {"queryDequantScale", q_scale}});
    plan.NotNull({{"keyDequantScale", key_scale}, {"sequsedK", used_k}, {"metadata", metadata}});
    plan.NotNull({{"sparseIndicesOut", places}, {"sparseValuesOut", scores}});
    plan.Require(!cu_q && !cu_k && !used_q && !residual && !block_table && !index_offset && return_value == 1,
                 "the simulator knows rows with used lengths and returned values only");
    plan.Type("query", q, {DataType::kFloat4E2m1});
    plan.Type("key", keys, {DataType::kFloat4E2m1});
    plan.Type("weights", weights, {DataType::kFloat});
    plan.Type("queryDequantScale", q_scale, {DataType::kFloat8E8m0});
    plan.Type("keyDequantScale", key_scale, {DataType::kFloat8E8m0});
    plan.Require(q->rank() == 4 && keys->rank() == 4, "query and key need four axes");
    CheckForms(plan, q->dim(2), top_k, quant_mode, layout_q, layout_k, mask, ratio);
    plan.Shape("query", q, {q->dim(0), 1, q->dim(2), kHeadDim});
    plan.Shape("key", keys, {q->dim(0), keys->dim(1), 1, kHeadDim});
    plan.Shape("weights", weights, {q->dim(0), 1, q->dim(2)});
    plan.Shape("queryDequantScale", q_scale, MxScaleDims(q->dims));
    plan.Shape("keyDequantScale", key_scale, MxScaleDims(keys->dims));
    plan.Type("sequsedK", used_k, {DataType::kInt32});
    plan.Shape("sequsedK", used_k, {q->dim(0)});
    CheckMetadata(plan, metadata);
    plan.Type("sparseIndicesOut", places, {DataType::kInt32});
    plan.Shape("sparseIndicesOut", places, {q->dim(0), 1, 1, top_k});
    plan.Type("sparseValuesOut", scores, {DataType::kBf16});
    plan.Shape("sparseValuesOut", scores, places->dims);
    plan.Attribute("maxSeqlenQ", static_cast<double>(max_q));
    plan.Touches({q, keys, weights, q_scale, key_scale, used_k, metadata, places, scores});
    plan.Work(Choice{*q, *keys, *weights, *q_scale, *key_scale, *used_k, *metadata, *places, *scores, top_k});
  });
}
SIM_PHASE_TWO(aclnnQuantLightningIndexerV2)
