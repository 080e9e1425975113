// Attention over a window and selected rows with a sink, and its metadata (spec: ascend 5.2). Of the documented forms
// the simulator knows batches of rows with lengths: layout BSND, no mask, no block table, no sparse indices.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "operator.h"

using namespace ascend_sim;

namespace {

constexpr int64_t kHeadDim = 512;
constexpr int64_t kMetadataWords = 1024;
constexpr int32_t kMetadataMagic = 0x4D4C41;

// The settings that both operators must be given alike; the metadata carries them to the main operator.
struct Settings {
  int64_t heads;
  int64_t ratio;
  int64_t ori_mask;
  int64_t cmp_mask;
  bool has_ori;
  bool has_cmp;

  Values words() const {
    Values words(kMetadataWords, 0.0);
    const double used[] = {double{kMetadataMagic},
                           static_cast<double>(heads),
                           static_cast<double>(ratio),
                           static_cast<double>(ori_mask),
                           static_cast<double>(cmp_mask),
                           double(has_ori),
                           double(has_cmp)};
    std::copy(std::begin(used), std::end(used), words.begin());
    return words;
  }
};

void CheckForms(const Plan& plan, const Settings& settings, const char* layout_q, const char* layout_kv) {
  plan.NotNull({{"layoutQ", layout_q}, {"layoutKv", layout_kv}});
  plan.Require(std::string(layout_q) == "BSND" && std::string(layout_kv) == "BSND",
               "the simulator knows layout BSND only");
  plan.Require(settings.ori_mask == 0 && settings.cmp_mask == 0, "the simulator knows mask mode 0 only");
  plan.Require(settings.heads >= 1 && settings.heads <= 128, "there are " + std::to_string(settings.heads) + " heads");
  plan.Require(settings.ratio == 1, "cmpRatio is " + std::to_string(settings.ratio) + "; without a mask it must be 1");
  plan.Require(settings.has_ori, "oriKv is missing");
}

void CheckMetadata(const Plan& plan, const aclTensor* metadata) {
  plan.Type("metadata", metadata, {DataType::kInt32});
  plan.Shape("metadata", metadata, {kMetadataWords});
}

// Rows (B, S, 1, 512) and the number of valid ones of each batch entry.
void CheckRows(const Plan& plan, const char* what, const aclTensor* q, const aclTensor* rows, const aclTensor* used) {
  plan.NotNull({{what, rows}, {"the used lengths", used}});
  plan.Type(what, rows, {q->dtype});
  plan.Require(rows->rank() == 4, std::string(what) + " must have four axes");
  plan.Shape(what, rows, {q->dim(0), rows->dim(1), 1, kHeadDim});
  plan.Type("used lengths", used, {DataType::kInt32});
  plan.Shape("used lengths", used, {q->dim(0)});
}

// Pointers to the valid rows of one batch entry.
void AddRows(std::vector<const double*>& valid, const Values& rows, const Values& used, int64_t batch, int64_t length) {
  const auto count = static_cast<int64_t>(used[batch]);
  if (count < 0 || count > length) throw Refusal{kCoreException, "a used length of " + std::to_string(count)};
  for (int64_t i = 0; i < count; ++i) valid.push_back(rows.data() + (batch * length + i) * kHeadDim);
}

// softmax(q k) k over the rows, the sink in the denominator only. A product of matrices takes operands of one type, so
// that a probability, scaled by the largest one, is rounded to that of the rows before it meets them.
void AttendHead(const double* q, const std::vector<const double*>& rows, double sink, double scale, DataType dtype,
                double* out) {
  std::fill(out, out + kHeadDim, 0.0);
  if (rows.empty()) return;
  std::vector<double> scores;
  for (const double* row : rows) {
    double dot = 0;
    for (int64_t i = 0; i < kHeadDim; ++i) dot += q[i] * row[i];
    scores.push_back(dot * scale);
  }
  const double peak = *std::max_element(scores.begin(), scores.end());
  double total = std::exp(sink - peak);
  for (size_t r = 0; r < rows.size(); ++r) {
    const double share = std::exp(scores[r] - peak), rounded = RoundTo(dtype, share);
    total += share;
    for (int64_t i = 0; i < kHeadDim; ++i) out[i] += rounded * rows[r][i];
  }
  for (int64_t i = 0; i < kHeadDim; ++i) out[i] /= total;
}

struct Attention {
  aclTensor q, ori, cmp, ori_used, cmp_used, sinks, metadata, out;
  bool has_cmp;
  double scale;
  Settings settings;

  void operator()(const Memory& memory) const {
    if (memory.Load(metadata) != settings.words()) {
      throw Refusal{kCoreException, "the metadata was made for other settings, or is not there yet"};
    }
    const Values queries = memory.Load(q), window = memory.Load(ori), window_used = memory.Load(ori_used);
    const Values chosen = has_cmp ? memory.Load(cmp) : Values{},
                 chosen_used = has_cmp ? memory.Load(cmp_used) : Values{};
    const Values sink = memory.Load(sinks);
    Values result(queries.size());
    const int64_t per_batch = q.dim(1) * q.dim(2);
    for (int64_t batch = 0; batch < q.dim(0); ++batch) {
      std::vector<const double*> rows;
      AddRows(rows, window, window_used, batch, ori.dim(1));
      if (has_cmp) AddRows(rows, chosen, chosen_used, batch, cmp.dim(1));
      for (int64_t i = batch * per_batch; i < (batch + 1) * per_batch; ++i) {
        AttendHead(queries.data() + i * kHeadDim, rows, sink[i % q.dim(2)], scale, q.dtype,
                   result.data() + i * kHeadDim);
      }
    }
    memory.Store(out, result);
  }
};

}  // namespace

SIM_EXPORT aclnnStatus aclnnSparseFlashMlaMetadataGetWorkspaceSize(
    const aclTensor* cu_q, const aclTensor* cu_ori, const aclTensor* cu_cmp, const aclTensor* used_q,
    const aclTensor* used_ori, const aclTensor* used_cmp, const aclTensor* residual, const aclTensor* ori_topk_length,
    const aclTensor* cmp_topk_length, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t batch, int64_t max_q,
    int64_t max_ori, int64_t max_cmp, int64_t ori_topk, int64_t cmp_topk, int64_t ratio, int64_t ori_mask,
    int64_t cmp_mask, int64_t left, int64_t right, const char* layout_q, const char* layout_kv, bool has_ori,
    bool has_cmp, const aclTensor* metadata, uint64_t* bytes, aclOpExecutor** executor) {
  return Prepare("aclnnSparseFlashMlaMetadata", bytes, executor, [&](Plan& plan) {
    // A null pointer here crashes the real operator; an absent one is an empty INT32 tensor.
    for (const aclTensor* length :
         {cu_q, cu_ori, cu_cmp, used_q, used_ori, used_cmp, residual, ori_topk_length, cmp_topk_length}) {
      plan.NotNull({{"a length tensor", length}});
      plan.Type("a length tensor", length, {DataType::kInt32});
    }
    plan.NotNull({{"metadata", metadata}});
    const Settings settings{heads, ratio, ori_mask, cmp_mask, has_ori, has_cmp};
    CheckForms(plan, settings, layout_q, layout_kv);
    plan.Require(kv_heads == 1 && head_dim == kHeadDim, "headDim is " + std::to_string(head_dim) + " instead of 512");
    CheckMetadata(plan, metadata);
    for (const auto& [name, value] : {std::pair<const char*, int64_t>{"batchSize", batch},
                                      {"maxSeqlenQ", max_q},
                                      {"maxSeqlenOriKv", max_ori},
                                      {"maxSeqlenCmpKv", max_cmp},
                                      {"oriTopk", ori_topk},
                                      {"cmpTopk", cmp_topk},
                                      {"oriWinLeft", left},
                                      {"oriWinRight", right}}) {
      plan.Attribute(name, static_cast<double>(value));
    }
    plan.Touches({used_ori, used_cmp, metadata});
    plan.Work([metadata = *metadata, settings](const Memory& memory) { memory.Store(metadata, settings.words()); });
  });
}
SIM_PHASE_TWO(aclnnSparseFlashMlaMetadata)

SIM_EXPORT aclnnStatus aclnnSparseFlashMlaGetWorkspaceSize(
    const aclTensor* q, const aclTensor* ori, const aclTensor* cmp, const aclTensor* ori_indices,
    const aclTensor* cmp_indices, const aclTensor* ori_table, const aclTensor* cmp_table, const aclTensor* cu_q,
    const aclTensor* cu_ori, const aclTensor* cu_cmp, const aclTensor* used_q, const aclTensor* used_ori,
    const aclTensor* used_cmp, const aclTensor* residual, const aclTensor* ori_topk_length,
    const aclTensor* cmp_topk_length, const aclTensor* sinks, const aclTensor* metadata, double scale, int64_t ratio,
    int64_t ori_mask, int64_t cmp_mask, int64_t left, int64_t right, const char* layout_q, const char* layout_kv,
    int64_t value_mode, bool returns_lse, const aclTensor* out, const aclTensor* lse, uint64_t* bytes,
    aclOpExecutor** executor) {
  return Prepare("aclnnSparseFlashMla", bytes, executor, [&](Plan& plan) {
    plan.NotNull({{"q", q}, {"oriKv", ori}, {"sinks", sinks}, {"metadata", metadata}, {"attnOut", out}});
    plan.Require(!ori_indices && !cmp_indices && !ori_table && !cmp_table && !cu_q && !cu_ori && !cu_cmp && !used_q &&
                     !residual && !ori_topk_length && !cmp_topk_length && !returns_lse && !lse,
                 "the simulator knows rows with used lengths only");
    plan.Type("q", q, {DataType::kBf16, DataType::kFloat16});
    plan.Require(q->rank() == 4 && q->dim(3) == kHeadDim, "q of " + DimsText(q->dims) + " has no head dim of 512");
    const Settings settings{q->dim(2), ratio, ori_mask, cmp_mask, true, cmp != nullptr};
    CheckForms(plan, settings, layout_q, layout_kv);
    CheckRows(plan, "oriKv", q, ori, used_ori);
    if (cmp != nullptr) CheckRows(plan, "cmpKv", q, cmp, used_cmp);
    plan.Type("sinks", sinks, {DataType::kFloat});
    plan.Shape("sinks", sinks, {q->dim(2)});
    CheckMetadata(plan, metadata);
    plan.Require(value_mode == 1, "topkValueMode is " + std::to_string(value_mode));
    plan.Type("attnOut", out, {q->dtype});
    plan.Shape("attnOut", out, q->dims);
    plan.Attribute("softmaxScale", scale);
    plan.Attribute("oriWinLeft", static_cast<double>(left));
    plan.Attribute("oriWinRight", static_cast<double>(right));
    plan.Touches({q, ori, cmp, used_ori, used_cmp, sinks, metadata, out});
    plan.Work(Attention{*q, *ori, cmp ? *cmp : *ori, *used_ori, cmp ? *used_cmp : *used_ori, *sinks, *metadata, *out,
                        cmp != nullptr, scale, settings});
  });
}
SIM_PHASE_TWO(aclnnSparseFlashMla)
