// softmax.h: which keys of a piece its rows see, and scores that become weights.
#pragma once

#include "kernels/attention.h"
#include "kernels/portable/math.h"

namespace pelton::PELTON_ISA {

// The keys of a piece that a row sees: [begin, end), counted from the piece's first key.
struct Range {
    int begin, end;
};

inline Range visible(const AttendPiece& piece, int row) {
    const int end = piece.positions[row] + 1 - piece.first_position;
    const int begin = piece.window > 0 ? end - piece.window : 0;
    const Range range = {begin > 0 ? begin : 0, end < kPieceTokens ? end : kPieceTokens};
    return range.begin < range.end ? range : Range{0, 0};
}

// The panels of sixteen keys that any row of a tile sees.
inline Range visible_panels(const AttendPiece& piece, int row, int num_rows) {
    Range panels = {kPieceTokens / kGroup, 0};
    for (int r = row; r < row + num_rows; r++) {
        const Range keys = visible(piece, r);
        if (keys.begin == keys.end) continue;
        if (keys.begin / kGroup < panels.begin) panels.begin = keys.begin / kGroup;
        if ((keys.end + kGroup - 1) / kGroup > panels.end) panels.end = (keys.end + kGroup - 1) / kGroup;
    }
    return panels;
}

inline void fill(float* row, int begin, int end, float value) {
    for (int i = begin; i < end; i++) row[i] = value;
}

inline void cap(float* scores, Range panels, float softcap) {
    const VecF inverse = splat(1.0f / softcap), scale = splat(softcap);
    for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kLanes) {
        store(scores + i, scale * tanh(load(scores + i) * inverse));
    }
}

// Turns a row's scores into weights relative to their own maximum; returns maximum and sum of weights.
inline void soften(float* scores, Range keys, Range panels, float softcap, float* maximum, float* sum) {
    constexpr float kNone = -__builtin_inff();
    if (keys.begin == keys.end) {
        fill(scores, panels.begin * kGroup, panels.end * kGroup, 0.0f);
        *maximum = kNone;
        *sum = 0.0f;
        return;
    }
    if (softcap > 0) cap(scores, panels, softcap);
    fill(scores, panels.begin * kGroup, keys.begin, kNone);
    fill(scores, keys.end, panels.end * kGroup, kNone);
    VecF most[kParts], total[kParts];
    for (int n = 0; n < kParts; n++) most[n] = splat(kNone), total[n] = splat(0.0f);
    for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kGroup) {
        for (int n = 0; n < kParts; n++) most[n] = max(load(scores + i + n * kLanes), most[n]);
    }
    *maximum = max_group(most);
    for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kGroup) {
        for (int n = 0; n < kParts; n++) {
            float* place = scores + i + n * kLanes;
            const VecF weight = exp(load(place) - *maximum);
            store(place, weight);
            total[n] += weight;
        }
    }
    *sum = sum_group(total);
}

}  // namespace pelton::PELTON_ISA
